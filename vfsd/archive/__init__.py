"""A tree to a tar archive and back."""
