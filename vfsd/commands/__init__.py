"""The subcommands of `vfsd`, a module a group."""
