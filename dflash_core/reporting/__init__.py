"""What happened? Figures and the page."""
