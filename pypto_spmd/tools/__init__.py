"""What runs from a shell."""
