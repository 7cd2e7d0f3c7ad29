"""The method (arXiv 2405.15362): a building block, and the four steps from it to a schedule."""
