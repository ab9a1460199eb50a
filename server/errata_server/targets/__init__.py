"""From what an operator writes on the command line (a name, a directory, ``module:attribute``) to an application."""
