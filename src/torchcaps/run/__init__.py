"""What joins the rooms: models from plain data, training by recipe, comparison, export."""
