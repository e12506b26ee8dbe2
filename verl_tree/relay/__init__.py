"""A tree that exceeds the capacity, in sections: keys and values are handed down to later sections (docs/relay.md)."""
