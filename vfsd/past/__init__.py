"""Checkpoints: taken, named, compared, restored, forked, and shown as read-only trees."""
