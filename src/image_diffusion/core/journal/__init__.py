"""The journal that a stage writes and that tracking replays."""
