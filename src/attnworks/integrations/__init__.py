"""attnworks behind the interfaces of other libraries."""
