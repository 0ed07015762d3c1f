"""Generated from `protos/ebbtide/v1` when the package is built or installed in place; never edited."""
