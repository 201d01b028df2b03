"""The SGLang interface of this package. Only this folder and ``commands`` import SGLang.

Differences between supported releases are handled here. The types that most signatures need are
names of the folder itself.
"""

from sglang_gemma4_yoco.compat import attention as attention
from sglang_gemma4_yoco.compat import backends as backends
from sglang_gemma4_yoco.compat import batch as batch
from sglang_gemma4_yoco.compat import captured_prefills as captured_prefills
from sglang_gemma4_yoco.compat import decode_graphs as decode_graphs
from sglang_gemma4_yoco.compat import layers as layers
from sglang_gemma4_yoco.compat import names as names
from sglang_gemma4_yoco.compat import pools as pools
from sglang_gemma4_yoco.compat import release as release
from sglang_gemma4_yoco.compat import resolution as resolution
from sglang_gemma4_yoco.compat import server as server
from sglang_gemma4_yoco.compat import text_model as text_model
from sglang_gemma4_yoco.compat.batch import ForwardBatch as ForwardBatch
from sglang_gemma4_yoco.compat.server import ModelRunner as ModelRunner
from sglang_gemma4_yoco.compat.text_model import Method as Method
from sglang_gemma4_yoco.compat.text_model import TextModel as TextModel
