"""One module for each command: parse, call one library function, print."""
