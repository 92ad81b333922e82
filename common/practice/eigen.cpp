// The inner loops of Eigen's products, for all that readers write with them.
#include "common/practice/eigen.hpp"

#ifdef FA_PRODUCTS
FA_PRODUCTS(, float)
FA_PRODUCTS(, double)
#endif
