"""Prints the tables of fields."""

import sys

from ebbtide.gateway.fields.field_pages import field_tables

if __name__ == "__main__":
    sys.stdout.write(field_tables())
