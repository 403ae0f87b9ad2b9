"""What a process with an event loop needs: its HTTP server, and its periodic sleeps."""
