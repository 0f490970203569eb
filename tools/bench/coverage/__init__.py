"""How much of torch's operator database DTensor computes as one device would."""
