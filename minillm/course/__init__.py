"""The course: its table of chapters, the tour, handouts and grading."""
