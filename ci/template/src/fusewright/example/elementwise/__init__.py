"""Operations on each element of a tensor by itself: scale."""
