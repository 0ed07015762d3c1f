"""A small model that half masters a task, made on machines that can download none."""
