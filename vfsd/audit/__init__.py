"""Who changed what: each mutation recorded, and shown to people and programs."""
