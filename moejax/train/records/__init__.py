"""What a run writes about itself: metrics, events, its first lines, profiles, trackers."""
