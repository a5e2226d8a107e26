"""The daemon as a process: its start, its mountpoint, its entry in the runtime directory, what keeps it away."""
