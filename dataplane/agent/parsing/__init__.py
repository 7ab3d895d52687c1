"""Tool calls and reasoning in the text of an answer, by the format of the model's family. Pure: text in, pieces out."""
