"""The command line: one module for each verb, which parses, calls one library function, prints."""

from locater.cli.entry import main as main
