"""For every test: this directory is where helper modules are imported from."""
