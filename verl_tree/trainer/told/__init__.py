"""What a run tells of itself: metrics, trees and how far log-probs are apart."""
