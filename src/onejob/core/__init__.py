"""The vocabulary: nouns, ports and rules that every other part speaks; standard library and pydantic only."""
