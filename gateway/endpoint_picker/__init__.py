"""The Endpoint Picker of the Gateway API Inference Extension: Tidegate admits and routes what others relay.

Read first: ``processor``, which is one request.
"""
