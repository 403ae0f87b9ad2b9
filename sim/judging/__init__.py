"""How policies are compared: by what their runs attained for what they took, at every setting of them."""
