"""The streams to the coordinator: control messages, tokens out, acknowledgements in."""
