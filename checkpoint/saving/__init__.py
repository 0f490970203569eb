"""The way of a save: take apart, agree, deal out, stage, write."""
