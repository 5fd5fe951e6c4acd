"""Things to look at: what a program sends, where arrays live."""
