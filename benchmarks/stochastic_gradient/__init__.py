"""Benchmarks of AMAGOLD, SGLD, SGHMC and SGNHT: speed, bias, the paper's figures."""
