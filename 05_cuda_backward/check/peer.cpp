#include "common/harness/peers/peer.hpp"
