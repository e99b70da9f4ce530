"""Masses of several modes at temperature one, compared with quadrature."""
