"""Holds scenarios: what is simulated, as checked records, and the draws that follow from them and a seed."""
