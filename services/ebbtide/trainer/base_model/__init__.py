"""Makes a small model that half masters a task, on machines that cannot download one."""
