"""Devices: what there is and what it can compute natively. Planning and placement over several devices come here."""
