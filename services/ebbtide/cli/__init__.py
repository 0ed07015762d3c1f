"""The `ebbtide` command, and the launcher of local clusters that `ebbtide demo` and `ebbtide up` share."""
