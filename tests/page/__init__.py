"""The page of the admin port, in headless Chromium."""
