"""Tools that inspect calls, parameters and programs: plans, checks and reports."""
