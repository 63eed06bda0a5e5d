"""Tools that inspect a user's calls, parameters and programs, and print plans and reports."""
