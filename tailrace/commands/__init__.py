"""The commands of `tailrace` that have subcommands."""
