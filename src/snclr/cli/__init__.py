"""The command line: flags generated from the functions in `snclr.api`, and printing of their results."""
