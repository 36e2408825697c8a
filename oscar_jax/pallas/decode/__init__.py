"""Attention of the newest tokens, and the merge of its partial results."""
