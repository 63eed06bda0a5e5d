"""One call: its static part, the view of its rows, and which implementation runs it."""
