"""Policies that Ebbtide is compared with: rivals as published, an oracle, and Ebbtide without some of its parts."""
