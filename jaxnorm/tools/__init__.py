"""Tools for users that inspect calls, parameters and programs, and print plans and reports."""
