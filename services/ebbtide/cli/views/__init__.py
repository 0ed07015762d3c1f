"""What the commands show: screens, tables, timelines."""
