"""Policies that divide rollouts to shorten a step's tail, published ones and Ebbtide's, and how they speculate."""
