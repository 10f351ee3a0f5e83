"""The documentation pages that `lehr explain` prints (package data)."""
