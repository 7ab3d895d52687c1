"""Constraints of answers: from their definition to the tokens that may come next. Imports no engine and no torch."""
