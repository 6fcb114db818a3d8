"""The command line: subcommands, arguments, error messages and help."""
