"""How keys reach the ranks that see them: arguments, pieces, the kinds of exchange, and the collectives of a group."""
