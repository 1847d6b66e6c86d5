"""How a master is kept between steps."""
